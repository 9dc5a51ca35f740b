"""The observer: watches all ranks as they train, and keeps the verdict on each run."""
