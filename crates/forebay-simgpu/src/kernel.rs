//! The one kernel that is known: the CRC-32 of blocks of device memory. **unsafe**: it reads and writes that memory.
//!
//! Modules are PTX text, of which the head and the entry's shape are read and the body is not: `forebay-device` has a
//! test that runs the body. Here counts what the driver sees of a kernel: how it is loaded and launched, that it runs
//! in its stream's order and late, on what memory, and until when that must stay.

use std::collections::HashSet;
use std::ffi::CStr;
use std::ops::Range;

use crate::check::{break_context, violation};
use crate::config::config;
use crate::state::{State, with_driver};
use crate::status::{
    ILLEGAL_ADDRESS, INVALID_HANDLE, INVALID_PTX, INVALID_VALUE, MISALIGNED, NOT_FOUND, Outcome,
    UNSUPPORTED_PTX,
};
use crate::stream::Work;

/// The entry, and its parameters: addresses of the list and of the results, the list's length.
const ENTRY: &str = ".entry forebay_crc32(";
const NAME: &CStr = c"forebay_crc32";
const PARAMETERS: [&str; 3] = [".param .u64", ".param .u64", ".param .u32"];

/// The PTX that the driver of CUDA 13.0 understands, and the GPU that it has.
const PTX_MAX: f32 = 9.0;
const TARGET_MAX: u32 = 90;

const ENTRY_BYTES: u64 = 16;
const RESULT_BYTES: u64 = 4;

/// Modules and functions by handle.
#[derive(Default)]
pub(crate) struct Modules {
    modules: HashSet<usize>,
    functions: HashSet<usize>,
}

/// A launch as it was asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared_bytes: u32,
    pub(crate) list: u64,
    pub(crate) results: u64,
    pub(crate) count: u32,
}

/// A launch that waits for its turn: where the bytes of list and results are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launch {
    list: usize,
    results: usize,
    count: usize,
}

impl State {
    pub(crate) fn load_module(&mut self, image: &CStr) -> Outcome<usize> {
        if let Some(code) = config().module_fail {
            return Err(code);
        }
        check_ptx(image.to_str().map_err(|_| INVALID_PTX)?)?;
        let handle = self.fresh_handle();
        self.kernels.modules.insert(handle);
        Ok(handle)
    }

    pub(crate) fn function(&mut self, module: usize, name: &CStr) -> Outcome<usize> {
        if !self.kernels.modules.contains(&module) {
            return violation(INVALID_HANDLE, &format!("no module has the handle {module:#x}"));
        }
        if name != NAME {
            return Err(NOT_FOUND);
        }
        let handle = self.fresh_handle();
        self.kernels.functions.insert(handle);
        Ok(handle)
    }

    /// Errors when there is no such function: before its parameters are looked at.
    pub(crate) fn check_function(&self, function: usize) -> Outcome {
        if self.kernels.functions.contains(&function) {
            return Ok(());
        }
        violation(INVALID_HANDLE, &format!("no function has the handle {function:#x}"))
    }

    /// Queues a launch.
    pub(crate) fn launch(&mut self, request: Request, stream: usize) -> Outcome {
        let stream = self.stream(stream)?;
        let shape = request.grid[1..] == [1, 1] && request.block == [256, 1, 1];
        let grid = (1..=i32::MAX as u32).contains(&request.grid[0]);
        if !shape || !grid || request.shared_bytes != 0 {
            return violation(INVALID_VALUE, &format!("not the kernel's shape: {request:?}"));
        }
        if let Some(code) = config().launch_fail {
            return Err(code);
        }
        let list = self.device_range(request.list, u64::from(request.count) * ENTRY_BYTES)?;
        let results =
            self.device_range(request.results, u64::from(request.count) * RESULT_BYTES)?;
        if !list.start.is_multiple_of(8) || !results.start.is_multiple_of(4) {
            return violation(MISALIGNED, &format!("not aligned: {request:?}"));
        }
        let launch = Launch {
            list: self.memory.bytes_at(list.start) as usize,
            results: self.memory.bytes_at(results.start) as usize,
            count: request.count as usize,
        };
        let mark = stream.queue(Work::Launch(launch));
        self.hold_for_kernel((mark.stream.id, mark.number), vec![list, results]);
        Ok(())
    }

    /// A range of one allocation.
    fn device_range(&self, start: u64, len: u64) -> Outcome<Range<u64>> {
        let end = start.checked_add(len);
        match (self.memory.holding(start), end) {
            (Some(allocation), Some(end)) if end <= allocation.end => Ok(start..end),
            _ => {
                let what = format!("a kernel uses {len} bytes at {start:#x}, in no allocation");
                violation(ILLEGAL_ADDRESS, &what)
            }
        }
    }
}

impl Launch {
    /// Runs as the operation of this stream and number.
    pub(crate) fn run(&self, key: (u64, u64)) {
        let entries = self.list as *const [u64; 2];
        // SAFETY: the range was checked when the launch was queued, and is held; the stream's thread alone uses it now.
        let entries = unsafe { std::slice::from_raw_parts(entries, self.count) };
        let blocks = with_driver(|state| {
            let blocks = entries.iter().filter(|[_, len]| *len > 0);
            let ranges: Vec<_> = blocks
                .map(|&[start, len]| state.device_range(start, len))
                .collect::<Outcome<_>>()?;
            // Freed from here on it would be missed.
            state.hold_for_kernel(key, ranges);
            let place = |&[start, len]: &[u64; 2]| (state.memory.bytes_at(start), len as usize);
            Ok(entries.iter().map(place).collect::<Vec<_>>())
        });
        match blocks {
            Ok(blocks) => self.compute(&blocks),
            Err(status) => break_context(status),
        }
    }

    fn compute(&self, blocks: &[(u64, usize)]) {
        let table = table();
        for (index, &(place, len)) in blocks.iter().enumerate() {
            let mut crc = u32::MAX;
            for at in 0..len {
                // SAFETY: inside an allocation, which is held.
                let byte = unsafe { (place as *const u8).add(at).read() };
                crc = crc >> 8 ^ table[usize::from(crc as u8 ^ byte)];
            }
            // SAFETY: the range was checked when the launch was queued, and is held.
            unsafe { (self.results as *mut u32).add(index).write(!crc) };
        }
    }
}

/// The CRC of each byte.
fn table() -> [u32; 256] {
    std::array::from_fn(|byte| {
        let step = |crc: u32, _| crc >> 1 ^ if crc & 1 == 1 { 0xEDB8_8320 } else { 0 };
        (0..8).fold(byte as u32, step)
    })
}

fn check_ptx(text: &str) -> Outcome {
    let after = |word: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(word));
        line.map(str::trim).ok_or(INVALID_PTX)
    };
    let version: f32 = after(".version")?.parse().map_err(|_| INVALID_PTX)?;
    let target = after(".target sm_")?.parse::<u32>().map_err(|_| INVALID_PTX)?;
    if version > PTX_MAX || target > TARGET_MAX {
        return Err(UNSUPPORTED_PTX);
    }
    let (_, entry) = text.split_once(ENTRY).ok_or(INVALID_PTX)?;
    let (parameters, body) = entry.split_once(')').ok_or(INVALID_PTX)?;
    let mut declared = parameters.split(',').map(str::trim);
    let same =
        PARAMETERS.iter().all(|kind| declared.next().is_some_and(|have| have.starts_with(kind)));
    let whole =
        same && declared.next().is_none() && body.trim_start().starts_with(".maxntid 256, 1, 1");
    if whole { Ok(()) } else { Err(INVALID_PTX) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_gives_the_check_value() {
        let table = table();
        let step = |crc: u32, byte: &u8| crc >> 8 ^ table[usize::from(crc as u8 ^ byte)];
        assert_eq!(!b"123456789".iter().fold(u32::MAX, step), 0xCBF4_3926);
    }

    #[test]
    fn ptx_is_looked_at() {
        let good = "// head\n.version 8.0\n.target sm_75\n.visible .entry forebay_crc32(\n\
                    .param .u64 a,\n.param .u64 b,\n.param .u32 c\n)\n.maxntid 256, 1, 1\n{ret;}";
        assert_eq!(check_ptx(good), Ok(()));
        for (from, to, code) in [
            ("8.0", "9.1", UNSUPPORTED_PTX),
            ("sm_75", "sm_100", UNSUPPORTED_PTX),
            (".version", "version", INVALID_PTX),
            (".u32 c", ".u64 c", INVALID_PTX),
            ("256", "128", INVALID_PTX),
            ("_crc32(", "_crc64(", INVALID_PTX),
        ] {
            assert_eq!(check_ptx(&good.replace(from, to)), Err(code), "{to}");
        }
    }
}
