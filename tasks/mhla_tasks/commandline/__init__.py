"""Command-line interface: reads arguments and YAML files, checks and merges them, and starts the Lightning Trainer.

An option passes through these steps. Names in parentheses are modules of this package.

1. :func:`mhla_tasks.commandline.main.main` identifies the command, such as ``fit``, or the tool, such as ``export``.
2. :func:`mhla_tasks.commandline.arguments.read_words` parses the arguments once into a ``CommandLine``.
3. :func:`mhla_tasks.commandline.sources.read_sources` reads the configuration files. It returns a list of sources of options,
   from lowest to highest priority.
4. :func:`mhla_tasks.commandline.plan.make_plan` replaces former names of options (``moved_keys``), checks the sources
   (``problems``, ``trust``), adds the options stored in a checkpoint (``memory``), and merges everything into one configuration
   (``merging``).
5. ``mhla_tasks.commandline.parser.SuiteCLI`` passes this configuration to LightningCLI, which checks the types. Then model and
   data get the same values for the options that they share (``agreement``), and the output folder is set (``options``).
6. LightningCLI builds model, data and Trainer, and ``parser`` calls ``Trainer.fit``, ``validate``, ``test`` or ``predict``.
"""
