"""OpReplay: capture the operators a PyTorch program issues into one file, and do that work again without the program."""
