//! The mount table, and the mount that an open file lies on.
//!
//! A path does not say where a file lies: symlinks, bind mounts and mounts over mounts see to that.
//! An open file does: the kernel gives the id of its mount (statx since Linux 5.8, `fdinfo` since
//! 3.15), which is the first field of its line in `mountinfo`. Only where both are hidden is the
//! device number tried (btrfs has one a subvolume, not found in the table), and the longest path
//! last.

use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, StatxFlags};

use crate::Root;

/// One line of `/proc/self/mountinfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Id of the mount, unique while it exists.
    pub id: u64,
    /// Major and minor number of the file system's device.
    pub device: (u32, u32),
    /// The folder of the file system that is mounted.
    pub root: PathBuf,
    /// Where it is mounted.
    pub point: PathBuf,
    /// Type with subtype, such as `ext4` or `fuse.juicefs`.
    pub fs_type: String,
    /// What is mounted: a block device, `server:/export`, or a name without meaning.
    pub source: String,
    /// Options of the mount and of the file system, as they stand there, mount first.
    pub options: String,
}

/// Reads the text of a `mountinfo`. Lines that do not fit are left out.
pub fn parse_mountinfo(text: &str) -> Vec<Mount> {
    text.lines().filter_map(parse_line).collect()
}

/// The mounts that this process sees.
pub fn mounts(root: &Root) -> Vec<Mount> {
    parse_mountinfo(&root.read("proc/self/mountinfo").unwrap_or_default())
}

/// `36 35 98:0 /root /point rw,noatime master:1 - ext3 /dev/sda rw,errors=continue`: six fields,
/// any number of optional ones, a lone dash, three more.
fn parse_line(line: &str) -> Option<Mount> {
    let (left, right) = line.split_once(" - ")?;
    let mut left = left.split(' ');
    let id = left.next()?.parse().ok()?;
    let _parent = left.next()?;
    let (major, minor) = left.next()?.split_once(':')?;
    let root = unescape(left.next()?);
    let point = unescape(left.next()?);
    let mount_options = left.next()?;
    let mut right = right.split(' ');
    let fs_type = unescape(right.next()?);
    // The source may be empty, which leaves two spaces.
    let source = unescape(right.next()?);
    let options = format!("{mount_options},{}", right.next().unwrap_or_default());
    Some(Mount {
        id,
        device: (major.parse().ok()?, minor.parse().ok()?),
        root: root.into(),
        point: point.into(),
        fs_type,
        source,
        options,
    })
}

/// Undoes the octal escapes of the kernel: space `\040`, tab `\011`, newline `\012`, backslash
/// `\134`, hash `\043`.
pub fn unescape(field: &str) -> String {
    let bytes = field.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let Some((&first, tail)) = rest.split_first() {
        let octal = (first == b'\\').then(|| tail.get(..3).and_then(octal_byte)).flatten();
        match octal {
            Some(byte) => {
                out.push(byte);
                rest = tail.get(3..).unwrap_or_default();
            }
            None => {
                out.push(first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

fn octal_byte(digits: &[u8]) -> Option<u8> {
    let text = std::str::from_utf8(digits).ok()?;
    if !text.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    u8::from_str_radix(text, 8).ok()
}

/// The mount of an open file. `path` is only the last resort.
pub fn mount_of<'a>(mounts: &'a [Mount], file: impl AsFd, path: &Path) -> Option<&'a Mount> {
    let by_id = mount_id(&file).and_then(|id| mounts.iter().find(|mount| mount.id == id));
    by_id.or_else(|| mount_by_device(mounts, file)).or_else(|| mount_by_path(mounts, path))
}

fn mount_id(file: impl AsFd) -> Option<u64> {
    let flags = StatxFlags::MNT_ID;
    if let Ok(stat) = rustix::fs::statx(&file, "", AtFlags::EMPTY_PATH, flags)
        && stat.stx_mask & flags.bits() != 0
    {
        return Some(stat.stx_mnt_id);
    }
    let fdinfo = format!("proc/self/fdinfo/{}", file.as_fd().as_raw_fd());
    let text = Root::live().read(fdinfo)?;
    text.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok())
}

/// The last mount wins: it lies over earlier ones.
fn mount_by_device(mounts: &[Mount], file: impl AsFd) -> Option<&Mount> {
    let stat = rustix::fs::fstat(file).ok()?;
    let device = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
    mounts.iter().rev().find(|mount| mount.device == device)
}

/// The longest mount point that `path` begins with; of equals the last.
pub fn mount_by_path<'a>(mounts: &'a [Mount], path: &Path) -> Option<&'a Mount> {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let holds = mounts.iter().filter(|mount| path.starts_with(&mount.point));
    holds.max_by_key(|mount| mount.point.components().count())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
40 27 0:44 / /mnt/my\\040models rw master:7 propagate_from:2 - fuse.juicefs JuiceFS:m rw,user_id=0
41 27 0:45 /a\\134b /mnt/x\\040\\011y rw shared:3 - nfs4 10.0.0.1:/e rw,vers=4.2
42 27 0:46 / /mnt/none rw - tmpfs  rw
nonsense
43 27 0:x / /bad rw - tmpfs t rw
44 27 0:47 / /mnt/none rw - overlay overlay rw,lowerdir=/l
";

    #[test]
    fn fields_are_found_whatever_stands_between() {
        let mounts = parse_mountinfo(TEXT);
        assert_eq!(mounts.len(), 6, "the two lines that do not fit are left out");
        let juice = &mounts[2];
        assert_eq!(juice.point, Path::new("/mnt/my models"));
        assert_eq!(juice.fs_type, "fuse.juicefs");
        assert_eq!(juice.source, "JuiceFS:m");
        assert_eq!(juice.device, (0, 44));
        assert_eq!(juice.options, "rw,rw,user_id=0");
        assert_eq!(mounts[3].root, Path::new("/a\\b"));
        assert_eq!(mounts[3].point, Path::new("/mnt/x \ty"));
        assert_eq!(mounts[4].source, "", "an empty source keeps its place");
    }

    #[test]
    fn escapes() {
        assert_eq!(unescape("a\\040b\\134\\043"), "a b\\#");
        assert_eq!(unescape("tail\\04"), "tail\\04");
        assert_eq!(unescape("\\9zz\\777\\+12"), "\\9zz\\777\\+12");
        assert_eq!(unescape("\\303\\244"), "ä");
    }

    #[test]
    fn the_longest_and_last_mount_holds_a_path() {
        let mounts = parse_mountinfo(TEXT);
        let of = |path: &str| mount_by_path(&mounts, Path::new(path)).map(|mount| mount.id);
        assert_eq!(of("/mnt/none/file"), Some(44));
        assert_eq!(of("/mnt/nonesuch/file"), Some(27));
        assert_eq!(of("/"), Some(27));
        assert_eq!(mount_by_path(&[], Path::new("/x")), None);
    }

    #[test]
    fn an_open_file_is_found_by_its_mount() {
        let mounts = mounts(&Root::live());
        let proc = std::fs::File::open("/proc/self/status").unwrap();
        let found = mount_of(&mounts, &proc, Path::new("/")).unwrap();
        assert_eq!(found.fs_type, "proc");
        assert_eq!(mount_by_device(&mounts, &proc).unwrap().fs_type, "proc");
    }
}
