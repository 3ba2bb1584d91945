"""Write every part of the documentation that the library makes: `python -m docs._make`, or `make docs`."""

from docs._make.fill import write

for path in write():
    print(path)
