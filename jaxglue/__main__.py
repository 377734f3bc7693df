"""`python -m jaxglue`, the same as `jaxglue`."""

from jaxglue.commands import main

if __name__ == "__main__":
    main()
