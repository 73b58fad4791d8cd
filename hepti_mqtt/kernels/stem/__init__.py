"""What makes rows of a request's inputs: embeddings of tokens, patches of pictures."""
