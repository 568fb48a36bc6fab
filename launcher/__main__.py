from launcher.cli import start

if __name__ == "__main__":
    start()
