# docs/gpu.md says how it is built and run. -devel, because kernels.py is built with nvcc.
FROM pytorch/pytorch:2.13.0-cuda13.0-cudnn9-devel
WORKDIR /app
# The image's torch is one that pyproject.toml accepts, so pip does not install another.
ENV PIP_BREAK_SYSTEM_PACKAGES=1
COPY pyproject.toml README.md LICENSE ./
RUN pip install --no-cache-dir --editable ".[serve]"
COPY . .
CMD ["python", "train.py", "--help"]
