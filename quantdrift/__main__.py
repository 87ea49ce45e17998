"""`python -m quantdrift` is the command line."""

from quantdrift.cli.main import main

if __name__ == "__main__":
    main()
