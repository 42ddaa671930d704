"""The benchmark: checks a kernel, then times it, in one protocol for ours and for others. ``leanmla bench`` drives it."""
