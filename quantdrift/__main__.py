"""`python -m quantdrift` is the command line."""

from quantdrift.cli import main

if __name__ == "__main__":
    main()
