"""From the variance of a tensor to that of the next: the variance graph, its rules, and the walk that applies them."""
