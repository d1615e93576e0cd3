"""Models that are not GPTs, BERT and T5: their data, their training, what they are used for.
Imports techniques, run/, train.py, finetune/ and inference/. Begin with bert.py."""
