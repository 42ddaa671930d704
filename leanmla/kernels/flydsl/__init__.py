"""MLA decode for AMD Instinct MI355X (gfx950) in FlyDSL. Importing this package imports neither FlyDSL nor a GPU runtime."""
