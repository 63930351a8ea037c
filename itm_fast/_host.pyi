from typing import TypedDict

class BuildInformation(TypedDict):
    version: str
    compiler: str
    build_type: str
    torch: str
    python: str
    instruction_sets: list[str]
    cuda_architectures: list[str]

def build_information() -> BuildInformation: ...
