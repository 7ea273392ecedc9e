"""Command line of the suite: processing of arguments and YAML files, from ``sys.argv`` to the Trainer.

An option passes through these steps:

1. :func:`mhla_tasks.commandline.main.main` identifies the command or the tool.
2. :func:`mhla_tasks.commandline.arguments.read_words` parses the arguments once into a ``CommandLine``.
3. :func:`mhla_tasks.commandline.sources.read_sources` reads the configuration files into a list of sources, the weakest first.
4. :func:`mhla_tasks.commandline.plan.make_plan` renames moved options (``moved_keys``), checks the sources (``problems``,
   ``trust``), adds the options stored in a checkpoint (``memory``), and merges everything (``merging``) into one configuration.
5. ``mhla_tasks.commandline.parser.SuiteCLI`` passes this configuration to LightningCLI, which checks the types. Then options
   that model and data share are made equal (``agreement``), and output goes to the run's folder (``options``).
6. LightningCLI builds model, data and Trainer, and ``parser`` calls ``Trainer.fit``, ``validate``, ``test`` or ``predict``.
"""
