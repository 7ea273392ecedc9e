"""``lightning linearize``: from a pretrained model to an exported model with linear attention, in one command."""
