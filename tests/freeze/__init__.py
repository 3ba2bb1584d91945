"""The state of the project before its rebuilding, kept so that every later step has something to be compared with.

    python -m tests.freeze.make         checks out the frozen commit and records it into .freeze/ (not in git)
    python -m tests.freeze.compare      records the tree of today the same way and reports every difference

    part      what is recorded                                                               held to
    arrays    logits, loss and all gradients of every variant in float64, whole, in chunks,  1e-12 relative
              with packed documents; the weights they belong to
    runs      small training runs, to the end, stopped in the middle and continued           every bit
    texts     what commands print                                                            1e-9 relative, equal words
    counts    parameters, FLOPs, bytes of state and of a training step                       exact

One recorder per part runs on both sides: in the frozen tree, where this package is copied to, and in the tree of today.
The two sides differ only in what `names.py` says: where a function lives and how a parameter is called. Whoever
moves or renames something adds it there. `TWOAXIS_FREEZE` names another folder than `.freeze`.

This package is temporary: when the rebuilding is done, it is deleted with `small.json` and its line in .gitignore.
"""
