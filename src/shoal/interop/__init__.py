"""Tables in the formats of other systems: one file each, which `import shoal` does not import."""
