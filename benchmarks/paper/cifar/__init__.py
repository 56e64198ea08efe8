"""ResNets on CIFAR-10 against images of other kinds, beside the peers that others use on the same networks."""
