"""``python -m cplm_jax`` is the ``cplm`` command."""

from cplm_jax.cli import main

if __name__ == "__main__":
    main()
