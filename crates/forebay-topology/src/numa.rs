//! NUMA nodes: which CPUs and which PCI device belong together.

use crate::Root;

/// A list such as `0-3,8,10-11` names at most this many CPUs; more is nonsense (Linux allows 8192).
const CPUS_MAX: usize = 65_536;

/// One NUMA node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its number.
    pub id: u32,
    /// Its CPUs, ascending; empty for a node that is only memory.
    pub cpus: Vec<usize>,
}

/// The nodes of the machine, ascending. Empty when the kernel was built without NUMA.
pub fn nodes(root: &Root) -> Vec<Node> {
    let Some(online) = root.read("sys/devices/system/node/online") else { return Vec::new() };
    let ids = parse_list(&online).into_iter().filter_map(|id| u32::try_from(id).ok());
    ids.map(|id| Node { id, cpus: cpus_of_node(root, id) }).collect()
}

/// The CPUs of a node, ascending; empty when there is no such node.
pub fn cpus_of_node(root: &Root, node: u32) -> Vec<usize> {
    let list = root.read(format!("sys/devices/system/node/node{node}/cpulist"));
    parse_list(&list.unwrap_or_default())
}

/// The node of a PCI device such as `0000:01:00.0`. `None` when the firmware does not say (the kernel then gives -1,
/// as on most machines with one node) or there is no such device. Domains of eight digits, as NVML writes them, fit too.
pub fn node_of_pci(root: &Root, address: &str) -> Option<u32> {
    let address = normal_pci_address(address)?;
    let node: i64 = root.read_number(format!("sys/bus/pci/devices/{address}/numa_node"))?;
    u32::try_from(node).ok()
}

/// `00000000:3B:00.0` and `3b:00.0` as sysfs has it: `0000:3b:00.0`. `None` for anything that is not an address.
pub fn normal_pci_address(address: &str) -> Option<String> {
    let mut parts = address.rsplit(':');
    let (slot, function) = parts.next()?.split_once('.')?;
    let bus = parts.next()?;
    let domain = parts.next().unwrap_or("0");
    if parts.next().is_some() {
        return None;
    }
    let hex = |text: &str, max: u32| {
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        digits.then(|| u32::from_str_radix(text, 16).ok()).flatten().filter(|value| *value <= max)
    };
    let (domain, bus) = (hex(domain, u32::MAX)?, hex(bus, 0xff)?);
    let (slot, function) = (hex(slot, 0x1f)?, hex(function, 7)?);
    Some(format!("{domain:04x}:{bus:02x}:{slot:02x}.{function:x}"))
}

/// The numbers of a list such as `0-3,8`, ascending. Parts that do not fit are left out.
pub fn parse_list(list: &str) -> Vec<usize> {
    let mut numbers = Vec::new();
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>()) else {
            continue;
        };
        let room = CPUS_MAX.saturating_sub(numbers.len());
        numbers.extend((first..=last).take(room));
    }
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}
