# Runs weft's demo on CPU ranks:
#     docker build -t weft . && docker run --rm weft
# docker run --rm weft demo --kill 2 kills a rank meanwhile; docker run --rm weft doctor looks at the machine.
FROM python:3.12-slim-bookworm

RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home weft

WORKDIR /src
RUN pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
COPY pyproject.toml README.md LICENSE ./
COPY weft weft
RUN pip install --no-cache-dir '.[transformers]'

USER weft
WORKDIR /home/weft
ENTRYPOINT ["weft"]
CMD ["demo"]
