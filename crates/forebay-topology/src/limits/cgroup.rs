//! Finding the folders of this process's control groups.
//!
//! `/proc/self/cgroup` gives a path in the hierarchy, `mountinfo` where the hierarchy is mounted
//! and which part of it. In a container without a cgroup namespace the path is the host's while
//! only the container's own part is mounted: its root is then cut from the path. When that still
//! leads nowhere, the mount point is what can be seen.

use std::path::{Path, PathBuf};

use crate::{Root, mounts};

/// A hierarchy deeper than this is not walked further.
const DEPTH_MAX: usize = 64;

/// The version of a hierarchy, which decides the names of its files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Version {
    V1,
    V2,
}

/// Folders of the group of this process and of the groups above it, nearest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Groups {
    pub(crate) version: Version,
    pub(crate) folders: Vec<PathBuf>,
}

/// The groups that govern `controller` (`cpu`, `memory`): of version 1 where it is mounted so, and
/// of version 2.
pub(crate) fn groups(root: &Root, controller: &str) -> Vec<Groups> {
    let membership = root.read("proc/self/cgroup").unwrap_or_default();
    let mounts = mounts::mounts(root);
    let mut found = Vec::new();
    for line in membership.lines() {
        let mut fields = line.splitn(3, ':');
        let (_, Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let version = match controllers {
            "" => Version::V2,
            names if names.split(',').any(|name| name == controller) => Version::V1,
            _ => continue,
        };
        let mount = mounts.iter().find(|mount| match version {
            Version::V2 => mount.fs_type == "cgroup2",
            Version::V1 => {
                let mut options = mount.options.split(',');
                mount.fs_type == "cgroup" && options.any(|option| option == controller)
            }
        });
        if let Some(mount) = mount {
            let folders = folders(root, &mount.point, &mount.root, Path::new(path));
            found.push(Groups { version, folders });
        }
    }
    found
}

fn folders(root: &Root, point: &Path, mounted: &Path, path: &Path) -> Vec<PathBuf> {
    let below = path.strip_prefix(mounted).or_else(|_| path.strip_prefix("/")).unwrap_or(path);
    let climbs = below.components().any(|part| part == std::path::Component::ParentDir);
    let deepest = if climbs { point.to_owned() } else { point.join(below) };
    let there = root.path(&deepest).is_dir();
    let start = if there { deepest } else { point.to_owned() };
    let up = start.ancestors().take_while(|folder| folder.starts_with(point));
    up.take(DEPTH_MAX).map(Path::to_owned).collect()
}
