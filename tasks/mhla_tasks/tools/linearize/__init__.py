"""Implementation of ``lightning linearize``, which converts a pretrained model to an exported model with linear attention."""
