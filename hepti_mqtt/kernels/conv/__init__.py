"""Maps of one image: convolution as blocks of a matrix product, and pooling."""
