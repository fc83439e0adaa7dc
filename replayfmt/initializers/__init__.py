"""What fills storages whose content was not captured."""
