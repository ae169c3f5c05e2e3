//! CUDA through the driver library, opened at run time.

mod checksum;
mod driver;
mod kernel_scratch;
mod memory;
mod stream;

pub use checksum::{CHECKSUM_BLOCK_BYTES_MAX, ChecksumKernel, Pending};
pub use memory::{DeviceBuffer, Registration};
pub use stream::{Event, Stream};

use std::sync::{Arc, Mutex, OnceLock};

use driver::{Context, Driver, driver};
use forebay_error::{Code, Error, Result};
use forebay_topology::{Root, numa};

/// Attribute numbers of `cuDeviceGetAttribute`, from `CUdevice_attribute` in cuda.h.
mod attribute {
    pub(super) const MAX_PITCH: i32 = 11;
    pub(super) const READ_ONLY_HOST_REGISTER_SUPPORTED: i32 = 113;
}

/// One GPU of this process, with its primary context retained for as long as the process runs.
///
/// The context is kept on purpose: frameworks share it, and releasing the last reference would tear down theirs.
pub struct CudaDevice {
    driver: &'static Driver,
    ordinal: u32,
    context: Context,
    name: String,
    uuid: String,
    pci_address: Option<String>,
    numa_node: Option<u32>,
    max_pitch: u64,
    read_only_registration: bool,
    checksum: OnceLock<checksum::Cached>,
}

/// Devices opened so far, by ordinal: opening one twice gives the same object.
static OPENED: Mutex<Vec<Arc<CudaDevice>>> = Mutex::new(Vec::new());

impl CudaDevice {
    /// The number of GPUs that this process may use; 0 without a driver.
    pub fn count() -> u32 {
        driver().and_then(Driver::device_count).unwrap_or(0)
    }

    /// Opens the GPU that CUDA counts as `ordinal` in this process (after `CUDA_VISIBLE_DEVICES`).
    pub fn by_ordinal(ordinal: u32) -> Result<Arc<Self>> {
        let driver = driver()?;
        let mut opened = match OPENED.lock() {
            Ok(guard) => guard,
            Err(poisoned) => poisoned.into_inner(),
        };
        if let Some(device) = opened.iter().find(|device| device.ordinal == ordinal) {
            return Ok(device.clone());
        }
        let count = driver.device_count()?;
        if ordinal >= count {
            return Err(Error::new(Code::NoDevice, format!("no GPU {ordinal}, there are {count}"))
                .hint("see `nvidia-smi -L` and CUDA_VISIBLE_DEVICES"));
        }
        let device = Arc::new(Self::open(driver, ordinal)?);
        opened.push(device.clone());
        Ok(device)
    }

    /// Opens the GPU with this UUID (`GPU-xxxxxxxx-...`, as `nvidia-smi -L` prints it).
    pub fn by_uuid(uuid: &str) -> Result<Arc<Self>> {
        let driver = driver()?;
        for ordinal in 0..driver.device_count()? {
            if driver.device_uuid(driver.device(ordinal)?)? == uuid {
                return Self::by_ordinal(ordinal);
            }
        }
        Err(Error::new(Code::NoDevice, format!("no GPU has the UUID {uuid}"))
            .hint("see `nvidia-smi -L` and CUDA_VISIBLE_DEVICES"))
    }

    fn open(driver: &'static Driver, ordinal: u32) -> Result<Self> {
        let device = driver.device(ordinal)?;
        let pci_address = driver.device_pci_address(device).ok();
        let numa_node =
            pci_address.as_deref().and_then(|address| numa::node_of_pci(&Root::live(), address));
        let attribute = |number| driver.device_attribute(device, number);
        Ok(Self {
            driver,
            ordinal,
            name: driver.device_name(device)?,
            uuid: driver.device_uuid(device)?,
            pci_address,
            numa_node,
            max_pitch: attribute(attribute::MAX_PITCH)?.max(0) as u64,
            read_only_registration: attribute(attribute::READ_ONLY_HOST_REGISTER_SUPPORTED)
                .is_ok_and(|value| value != 0),
            checksum: OnceLock::new(),
            context: driver.retain_primary_context(device)?,
        })
    }

    /// The ordinal as CUDA counts it in this process.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// The product name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The UUID, `GPU-...`.
    pub fn uuid(&self) -> &str {
        &self.uuid
    }

    /// The PCI address, as sysfs spells it (`0000:01:00.0`).
    pub fn pci_address(&self) -> Option<&str> {
        self.pci_address.as_deref()
    }

    /// The NUMA node that the GPU hangs on, where the machine has more than one and says so.
    pub fn numa_node(&self) -> Option<u32> {
        self.numa_node
    }

    /// Whether read-only host memory can be registered, which page-cache DMA needs.
    pub fn read_only_registration(&self) -> bool {
        self.read_only_registration
    }

    /// Makes the device's context current on this thread, in relaxed stream-capture mode. Every thread that calls
    /// anything else here must have done so.
    pub fn bind_thread(&self) -> Result<()> {
        self.driver.set_current(self.context)?;
        self.driver.relax_capture_mode()
    }

    /// Runs `work` with the device's context current on this thread, and puts the caller's own back afterwards.
    pub fn with_context<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let before = self.driver.current_context()?;
        self.driver.set_current(self.context)?;
        let result = work();
        self.driver.set_current(before)?;
        result
    }

    /// The allocation that holds a device address. The context must be current.
    pub fn allocation_of(&self, address: u64) -> Result<std::ops::Range<u64>> {
        let (base, len) = self.driver.allocation_of(address)?;
        Ok(base..base.saturating_add(len as u64))
    }

    /// Free and total bytes of device memory, as the driver sees them. The context must be current.
    pub fn memory_info(&self) -> Result<(u64, u64)> {
        self.driver.memory_info()
    }
}

/// The version of the CUDA interface that the driver offers (13000 for 13.0); an error without a driver.
pub fn driver_version() -> Result<i32> {
    static VERSION: OnceLock<i32> = OnceLock::new();
    if let Some(version) = VERSION.get() {
        return Ok(*version);
    }
    let version = driver()?.version()?;
    Ok(*VERSION.get_or_init(|| version))
}
