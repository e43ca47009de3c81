from turnmill_worker.cli import main

# Engines spawn processes, which import this module again.
if __name__ == "__main__":
    main()
