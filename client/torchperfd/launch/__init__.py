"""Launch: ``torchperfd run``, which runs a script unedited in this process."""
