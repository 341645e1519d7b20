"""What an operator of several hosts adds to the one-sided one: a rail between equal places."""
