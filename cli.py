"""The command line from a checkout: ``python cli.py fit --config ...``, the same as ``lightning fit --config ...``."""

from mhla_tasks.commandline.main import main

if __name__ == "__main__":
    main()
