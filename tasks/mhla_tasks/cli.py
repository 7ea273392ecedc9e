"""The command line of every domain: ``lightning fit|validate|test|predict --config FILE [--config OVERLAY] [--key=value]``."""

from lightning.pytorch.cli import LightningCLI


def main() -> None:
    """Run."""
    LightningCLI(save_config_kwargs={"overwrite": True})
