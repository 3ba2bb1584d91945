"""What tests of several rooms share: commands, processes, numbers, and models of other people."""
