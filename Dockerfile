# The server, with the bundled model or MODEL:
#
#   docker build -t atomc .                                                         for CPUs
#   docker build -t atomc:cuda --build-arg TORCH_INDEX=https://pypi.org/simple .    for NVIDIA GPUs
#   docker run -p 8000:8000 atomc
#   docker run -p 8000:8000 --gpus all --ipc=host -v ~/.cache/huggingface:/home/atomc/.cache/huggingface \
#       atomc:cuda serve Qwen/Qwen3-0.6B --host 0.0.0.0
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY atomc atomc
COPY passes passes
COPY models models
COPY runtime runtime
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
# Of the two, pip takes the CPU wheel of the pinned version if the index has one: 2.13.0+cpu is newer than 2.13.0.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Inductor compiles C++ on CPUs, Triton its launchers.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /constraints.txt
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --extra-index-url ${TORCH_INDEX} --constraint /constraints.txt "$(echo /wheels/*.whl)[serve]"
RUN useradd --create-home atomc
USER atomc
WORKDIR /home/atomc
EXPOSE 8000
HEALTHCHECK --start-period=10m CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["atomc"]
CMD ["serve", "--host", "0.0.0.0"]
