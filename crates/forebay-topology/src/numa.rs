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

/// The node of a PCI device such as `0000:01:00.0`. `None` when the firmware does not say (the
/// kernel then gives -1, as on most machines with one node) or there is no such device. Domains of
/// eight digits, as NVML writes them, fit too.
pub fn node_of_pci(root: &Root, address: &str) -> Option<u32> {
    let address = normal_pci_address(address)?;
    let node: i64 = root.read_number(format!("sys/bus/pci/devices/{address}/numa_node"))?;
    u32::try_from(node).ok()
}

/// `00000000:3B:00.0` and `3b:00.0` as sysfs has it: `0000:3b:00.0`. `None` for anything that is
/// not an address.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let tree = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = tree.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        tree
    }

    #[test]
    fn lists() {
        assert_eq!(parse_list("0-3,8,10-11\n"), [0, 1, 2, 3, 8, 10, 11]);
        assert_eq!(parse_list("5,1-2,1"), [1, 2, 5]);
        assert_eq!(parse_list(""), [0_usize; 0]);
        assert_eq!(parse_list("3-1,x,2-,4"), [4]);
        assert_eq!(parse_list("0-18446744073709551615").len(), CPUS_MAX, "bounded");
    }

    /// Two sockets, a GPU on each, and a node of memory only, as a Grace machine shows its GPU
    /// memory.
    #[test]
    fn a_captured_machine() {
        let tree = tree(&[
            ("sys/devices/system/node/online", "0-1,4\n"),
            ("sys/devices/system/node/node0/cpulist", "0-3,8-11\n"),
            ("sys/devices/system/node/node1/cpulist", "4-7,12-15\n"),
            ("sys/devices/system/node/node4/cpulist", "\n"),
            ("sys/bus/pci/devices/0000:3b:00.0/numa_node", "0\n"),
            ("sys/bus/pci/devices/0001:af:00.0/numa_node", "1\n"),
            ("sys/bus/pci/devices/0000:01:00.0/numa_node", "-1\n"),
        ]);
        let root = Root::at(tree.path());
        let nodes = nodes(&root);
        assert_eq!(nodes.iter().map(|node| node.id).collect::<Vec<_>>(), [0, 1, 4]);
        assert_eq!(nodes[1].cpus, [4, 5, 6, 7, 12, 13, 14, 15]);
        assert!(nodes[2].cpus.is_empty());
        assert!(cpus_of_node(&root, 9).is_empty());
        assert_eq!(node_of_pci(&root, "00000000:3B:00.0"), Some(0));
        assert_eq!(node_of_pci(&root, "3b:00.0"), Some(0));
        assert_eq!(node_of_pci(&root, "0001:af:00.0"), Some(1));
        assert_eq!(node_of_pci(&root, "0000:01:00.0"), None, "the firmware does not say");
        assert_eq!(node_of_pci(&root, "0000:02:00.0"), None, "no such device");
    }

    #[test]
    fn what_is_no_address_reads_no_file() {
        for bad in ["", "x", "../../../etc", "0000:01:00", "0:0:1:00.0", "0000:1g:00.0", "0:1:0.8"]
        {
            assert_eq!(normal_pci_address(bad), None, "{bad}");
        }
        assert_eq!(normal_pci_address("10000:e1:00.0").as_deref(), Some("10000:e1:00.0"));
        assert_eq!(normal_pci_address("0:1:0.0").as_deref(), Some("0000:01:00.0"));
    }
}
