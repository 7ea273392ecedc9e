"""``python -m mhla_tasks`` is ``lightning``: for ``torchrun -m``."""

from mhla_tasks.commandline.main import main

if __name__ == "__main__":
    main()
