//! GPU and host memory behind one interface.
//!
//! [`Device`] says where bytes go: [`Device::Host`] is the system's memory, [`Device::Cuda`] a GPU whose driver was
//! opened at run time. Nothing here needs a CUDA toolkit to build, and a machine without a driver is normal: the host
//! device works there, and asking for a GPU gives `error[no_device]`.
//!
//! Rules that the CUDA half keeps, each from somebody's failure:
//! - The primary context of the device that the caller named is retained; no other device is ever touched.
//! - A missing symbol is an error value, never a panic: the driver table is filled once, by hand, and what is optional
//!   says so.
//! - Worker threads run in relaxed stream-capture mode, so that a load in the background cannot break a graph capture.
//! - Pinned memory is mapped, touched, then registered (never write-combined: the CPU reads it on the way out), and it
//!   belongs to an [`Arena`] of fixed size.

mod arena;
pub mod cuda;
mod host;

pub use arena::{Arena, ArenaConfig, ArenaStats, Slot};
pub use host::{advise_huge, copy_rows};

use std::sync::Arc;

use forebay_error::{Code, Error, Result};

/// A place that tensors are loaded into or saved from.
#[derive(Clone)]
pub enum Device {
    /// System memory.
    Host,
    /// One GPU.
    Cuda(Arc<cuda::CudaDevice>),
}

impl Device {
    /// Opens a device by name: `host` or `cpu`; `cuda`, `cuda:N` (the ordinal as CUDA counts it in this process);
    /// `GPU-UUID`.
    ///
    /// Errors: `usage` for another spelling, `no_device` when there is no driver or no such GPU.
    pub fn open(name: &str) -> Result<Self> {
        if matches!(name, "host" | "cpu") {
            return Ok(Self::Host);
        }
        if name.starts_with("GPU-") {
            return Ok(Self::Cuda(cuda::CudaDevice::by_uuid(name)?));
        }
        let ordinal = match name.strip_prefix("cuda") {
            Some("") => Some(0),
            Some(rest) => rest.strip_prefix(':').and_then(|digits| digits.parse::<u32>().ok()),
            None => None,
        };
        match ordinal {
            Some(ordinal) => Ok(Self::Cuda(cuda::CudaDevice::by_ordinal(ordinal)?)),
            None => Err(Error::new(Code::Usage, format!("no device is called `{name}`"))
                .hint("say `host`, `cuda:N` or `GPU-UUID`")),
        }
    }

    /// The name to show: `host` or `cuda:N`.
    pub fn name(&self) -> String {
        match self {
            Self::Host => "host".to_owned(),
            Self::Cuda(device) => format!("cuda:{}", device.ordinal()),
        }
    }

    /// Whether this is a GPU.
    pub fn is_gpu(&self) -> bool {
        matches!(self, Self::Cuda(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_strictly() {
        assert!(matches!(Device::open("host"), Ok(Device::Host)));
        assert!(matches!(Device::open("cpu"), Ok(Device::Host)));
        for bad in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cudax", "cuda:99999999999"] {
            let error = Device::open(bad).err().expect("must be refused");
            assert_eq!(error.code(), Code::Usage, "{bad}");
        }
    }
}
