from turnmill.cli import main

main()
