"""What the kernels stand on: instruction set, compiler, threads, addresses, memory for weights, measured roofs."""
