"""Command line for a checkout: ``python cli.py fit --config ...`` does the same as ``lightning fit --config ...``."""

from mhla_tasks.commandline.main import main

if __name__ == "__main__":
    main()
