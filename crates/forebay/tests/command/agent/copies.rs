//! Two nodes with drives of their own, and an agent on each.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use forebay_store::{NODE_RECORDS, StoreSettings, create_split, is_data, split_url};
use forebay_tier::status::{CopyState, Status};

use super::{Agent, LONG, Site, private, verify};
use crate::ckpt_make::{State, save};
use crate::util::{forebay, text};

/// Folders of a job on two nodes, with a step that is nowhere else. The next tier is not there yet.
struct Nodes {
    site: Site,
}

impl Nodes {
    /// `limit`: for what comes to a drive.
    fn new(limit: &str) -> Self {
        let site = Site::with_tls("", "");
        private(&site.path("peer.token"), "0123456789abcdef-peer");
        for node in [0, 1] {
            std::fs::create_dir(site.path(&format!("run{node}"))).unwrap();
            let drive = site.path(&format!("drive{node}")).display().to_string();
            let records = site.path("shared").display().to_string();
            create_split(&split_url(&records, &drive, false), &StoreSettings::default()).unwrap();
            let config = format!(
                "[[tier]]\nname = \"drive\"\nplace = \"drive{node}\"\nrecords = \"shared\"\n\
                 copies = 1\ncopies_gone = \"6 s\"\n{limit}\n\
                 [[tier]]\nname = \"far\"\nplace = \"mount/far\"\n\
                 [tiers]\nlook_every = \"100 ms\"\npart_bytes = \"64 KiB\"\ngrace = \"1 s\"\n\
                 [agent]\nsocket = \"run{node}/agent.sock\"\nlisten = \"127.0.0.1:0\"\n\
                 token_file = \"read.token\"\npeer_token_file = \"peer.token\"\n\
                 peer_ca_file = \"cert.pem\"\ntls_certificate = \"cert.pem\"\n\
                 tls_key = \"key.pem\"\n"
            );
            std::fs::write(site.path(&format!("node{node}.toml")), config).unwrap();
        }
        let whole = site.path("whole");
        std::fs::create_dir(&whole).unwrap();
        save(&whole, 7, 2, 1, &State::new(1));
        for (name, bytes) in files(&whole) {
            let rank = name.rsplit('/').next().and_then(|name| name.split('_').nth(1));
            let to = match is_data(&name) {
                true => site.path(&format!("drive{}", rank.unwrap())),
                false => site.path("shared").join(NODE_RECORDS),
            };
            std::fs::create_dir_all(to.join(&name).parent().unwrap()).unwrap();
            std::fs::write(to.join(&name), bytes).unwrap();
        }
        Self { site }
    }

    fn start(&self, node: usize) -> Agent {
        let config = self.site.path(&format!("node{node}.toml"));
        let mut command = forebay();
        command.args(["agent", "--config", text(&config)]);
        self.site.run_as(command, &format!("run{node}/agent.sock"), &format!("agent{node}.log"))
    }

    /// The data files on a drive.
    fn data(&self, node: usize) -> BTreeMap<String, Vec<u8>> {
        let mut found = files(&self.site.path(&format!("drive{node}")));
        found.retain(|name, _| is_data(name) && !name.starts_with(".forebay/"));
        found
    }

    /// The data files of ranks.
    fn of_ranks(&self, ranks: &[&str]) -> BTreeMap<String, Vec<u8>> {
        let mut found = files(&self.site.path("whole"));
        found.retain(|name, _| {
            let rank = name.rsplit('/').next().and_then(|name| name.split('_').nth(1));
            is_data(name) && ranks.contains(&rank.unwrap())
        });
        found
    }

    /// What is on its way to a drive.
    fn coming(&self, node: usize) -> usize {
        let folder = self.site.path(&format!("drive{node}/.forebay/here/incoming"));
        std::fs::read_dir(folder).map_or(0, Iterator::count)
    }
}

/// All files below a folder.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(&next).into_iter().flatten() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => folders.push(path),
                false => {
                    let name = path.strip_prefix(folder).unwrap().to_str().unwrap().to_owned();
                    found.extend(std::fs::read(&path).ok().map(|bytes| (name, bytes)));
                }
            }
        }
    }
    found
}

fn wait(what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < LONG, "never {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn copied(status: &Status) -> bool {
    status.steps.iter().any(|step| step.copies[0] == CopyState::Copied)
}

#[test]
fn killed_in_the_middle_of_copies_both_go_on_and_leave_nothing() {
    let nodes = Nodes::new("write_limit = \"300 KB/s\"");
    let mut agents = [0, 1].map(|node| Some(nodes.start(node)));
    // Who takes, and then who sends.
    for killed in [0, 1] {
        wait("on its way", || nodes.coming(0) > 0);
        std::thread::sleep(Duration::from_millis(300));
        // By SIGKILL.
        agents[killed] = None;
        assert_eq!(
            nodes.data(0),
            nodes.of_ranks(&["0"]),
            "nothing has its name before it is whole"
        );
        agents[killed] = Some(nodes.start(killed));
    }
    for (node, agent) in agents.iter().flatten().enumerate() {
        agent.until(None, "copied", copied);
        assert_eq!(nodes.data(node), nodes.of_ranks(&["0", "1"]));
        wait("tidy", || nodes.coming(node) == 0);
    }
    let shown = forebay()
        .args(["tier", "status", "--config", text(&nodes.site.path("node0.toml"))])
        .output()
        .unwrap();
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains("drive copied") && shown.contains("to be on 1 other node"), "{shown}");
    assert!(!nodes.site.path("mount").exists());
}

#[test]
fn a_lost_node_s_part_of_the_newest_step_comes_from_its_buddy() {
    let nodes = Nodes::new("");
    let [kept, lost] = [0, 1].map(|node| nodes.start(node));
    lost.until(None, "copied", copied);
    drop(lost);
    std::fs::remove_dir_all(nodes.site.path("drive1")).unwrap();
    std::fs::create_dir(nodes.site.path("mount")).unwrap();
    let is_there = |status: &Status| status.steps[0].copies[1] == CopyState::Committed;
    let status = kept.until(None, "landed", is_there);
    assert_eq!(status.steps.len(), 1);
    let far = nodes.site.path("mount/far");
    verify(&far, 7);
    let whole = files(&nodes.site.path("whole"));
    let data = |all: &BTreeMap<String, Vec<u8>>| -> BTreeMap<String, Vec<u8>> {
        let files = all.iter().filter(|(name, _)| !name.contains(".forebay/"));
        files.map(|(name, bytes)| (name.clone(), bytes.clone())).collect()
    };
    assert_eq!(data(&files(&far)), data(&whole));
    wait("tidy", || nodes.data(0) == nodes.of_ranks(&["0"]));
}
