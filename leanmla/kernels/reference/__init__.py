"""The definition of the operator, offered as a backend."""
