"""Native operators: library loading, autograd Functions and fake kernels, one file per operator family."""
