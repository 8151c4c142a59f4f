def pytest_addoption(parser):
    parser.addoption("--screenshots", help="a folder for pictures of the pages")
