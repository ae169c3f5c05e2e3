//! The settings, from the environment. The opening of the crate lists them.

use std::str::FromStr;
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::check::give_up;
use crate::status::{ILLEGAL_ADDRESS, Status};

/// Settings of the process.
#[derive(Debug)]
pub(crate) struct Config {
    pub(crate) seed: u64,
    pub(crate) delay_us: u64,
    pub(crate) strict: bool,
    pub(crate) read_only: bool,
    pub(crate) register_fail: Option<Status>,
    pub(crate) register_gb_per_s: Option<f64>,
    pub(crate) unregister_gb_per_s: Option<f64>,
    pub(crate) pin_limit: u64,
    pub(crate) alloc_limit: u64,
    pub(crate) copy_fail_at: Option<u64>,
    pub(crate) copy_fail_code: Status,
    pub(crate) copy_fail_late: bool,
    pub(crate) module_fail: Option<Status>,
    pub(crate) launch_fail: Option<Status>,
}

/// The settings, read at the first call.
pub(crate) fn config() -> &'static Config {
    static CONFIG: OnceLock<Config> = OnceLock::new();
    CONFIG.get_or_init(|| Config {
        seed: setting("SIMGPU_SEED").unwrap_or_else(clock_seed),
        delay_us: setting("SIMGPU_DELAY_US").unwrap_or(200),
        strict: switch("SIMGPU_STRICT", true),
        read_only: switch("SIMGPU_READ_ONLY", true),
        register_fail: setting("SIMGPU_REGISTER_FAIL"),
        register_gb_per_s: setting("SIMGPU_REGISTER_GBPS"),
        unregister_gb_per_s: setting("SIMGPU_UNREGISTER_GBPS"),
        pin_limit: setting("SIMGPU_PIN_LIMIT").unwrap_or(u64::MAX),
        alloc_limit: setting("SIMGPU_ALLOC_LIMIT").unwrap_or(16 << 30),
        copy_fail_at: setting("SIMGPU_COPY_FAIL_AT"),
        copy_fail_code: setting("SIMGPU_COPY_FAIL_CODE").unwrap_or(ILLEGAL_ADDRESS),
        copy_fail_late: switch("SIMGPU_COPY_FAIL_LATE", false),
        module_fail: setting("SIMGPU_MODULE_FAIL"),
        launch_fail: setting("SIMGPU_LAUNCH_FAIL"),
    })
}

/// Random enough to differ from run to run.
fn clock_seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.as_nanos() as u64 ^ u64::from(std::process::id()) << 32
}

fn switch(name: &str, default: bool) -> bool {
    setting::<u8>(name).map_or(default, |value| value != 0)
}

fn setting<T: FromStr>(name: &str) -> Option<T> {
    let text = std::env::var_os(name)?;
    match text.to_str().and_then(|text| text.parse().ok()) {
        Some(value) => Some(value),
        // A test that misspells its setting would pass for nothing.
        None => give_up(&format!("{name}={} is not understood", text.display())),
    }
}
