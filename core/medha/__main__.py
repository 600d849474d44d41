"""`python -m medha`: the command `medha`."""

from medha.cli.__main__ import main

if __name__ == "__main__":
    main()
