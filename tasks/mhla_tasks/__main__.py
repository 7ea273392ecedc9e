"""Entry point for ``python -m mhla_tasks`` and ``torchrun -m mhla_tasks``, which run the same program as ``lightning``."""

from mhla_tasks.commandline.main import main

if __name__ == "__main__":
    main()
