"""The building blocks of a decoder: weights bound to kernels. No shapes of a family, no file."""
