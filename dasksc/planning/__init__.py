"""Plans of epochs, ranks, agreement between ranks, and the epoch counter."""
