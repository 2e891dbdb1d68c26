"""What every run needs: devices and processes, files and checksums, options, errors."""

from calibjax.runtime.platforms import skip_absent_tpu

skip_absent_tpu()  # before JAX initialises its devices, hence at the first import of anything below
