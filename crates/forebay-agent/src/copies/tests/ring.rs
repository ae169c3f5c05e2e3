//! Copies that are made, kept and used.

use std::net::TcpListener;
use std::time::Duration;

use forebay_tier::runner::Action;
use forebay_tier::status::{CopyState, Status};

use super::world::files;
use super::{Cluster, Node};

fn is_copied(status: &Status) -> bool {
    status.steps.iter().any(|step| step.copies[0] == CopyState::Copied)
}

fn go_on(node: &Node) {
    node.runner.act(&Action::Resume { tier: None }, "test").unwrap();
}

#[test]
fn each_node_s_files_come_to_a_buddy_byte_for_byte_and_go_when_they_have_landed() {
    let cluster = Cluster::new();
    let settings = cluster.settings(1, true);
    let nodes = [0, 1].map(|number| cluster.start(number, "", &settings));
    for node in &nodes {
        let status = node.until("copied", is_copied);
        let copies = status.copies.unwrap();
        assert_eq!((copies.wanted, copies.steps.len(), copies.failures), (1, 1, 0), "{copies:?}");
        assert_eq!(copies.steps[0].on.len(), 1);
        assert!(copies.sent_bytes > 0 && copies.steps[0].bytes == copies.sent_bytes);
    }
    for (number, node) in nodes.iter().enumerate() {
        let status = node.until("held", |s| s.copies.as_ref().unwrap().held_files > 0);
        let copies = status.copies.unwrap();
        assert_eq!(copies.nodes.len(), 1);
        assert!(copies.nodes[0].is_alive && copies.nodes[0].url.starts_with("https://"));
        let other = cluster.own(1 - number);
        assert_eq!(copies.held_files, other.len() as u64);
        assert_eq!(copies.received_bytes, copies.held_bytes);
        let mut both = cluster.own(number);
        both.extend(other);
        assert_eq!(node.data(), both);
        // What was seen a quarter of a second ago is shown once more.
        std::thread::sleep(Duration::from_millis(300));
        let text = crate::metrics::render(&node.jobs.all(), &node.counts);
        let held = format!("forebay_copies_held_bytes{{run=\"run7\"}} {}\n", copies.held_bytes);
        assert!(text.contains(&held), "{text}");
        assert!(text.contains("forebay_copies_missing_steps{run=\"run7\"} 0\n"), "{text}");
        let log = std::fs::read_to_string(cluster.path(&format!("audit{number}.log"))).unwrap();
        assert!(log.contains("\"copy\"") && log.contains("\"take_copy\""), "{log}");
    }
    nodes.iter().for_each(go_on);
    for (number, node) in nodes.iter().enumerate() {
        node.until("landed", |s| s.steps[0].copies[1] == CopyState::Committed);
        node.until("tidied", |s| s.copies.as_ref().unwrap().held_files == 0);
        assert_eq!(node.data(), cluster.own(number), "what was copied went, its own stays");
        assert!(node.marks().is_empty(), "{:?}", node.marks());
    }
    assert_eq!(files(&cluster.far, 7), files(&cluster.whole, 7));
    nodes.into_iter().for_each(Node::stop);
}

#[test]
fn a_step_whose_node_is_lost_comes_from_its_buddy() {
    let cluster = Cluster::new();
    let settings = cluster.settings(1, true);
    let [kept, lost] = [0, 1].map(|number| cluster.start(number, "", &settings));
    lost.until("copied", is_copied);
    let drive = lost.drive.clone();
    lost.stop();
    std::fs::remove_dir_all(drive).unwrap();
    go_on(&kept);
    let waits = kept.until("waiting", |s| s.tiers[1].written_bytes > 0);
    assert_ne!(waits.steps[0].copies[1], CopyState::Committed, "it may come back");
    kept.until("landed", |s| s.steps[0].copies[1] == CopyState::Committed);
    assert_eq!(files(&cluster.far, 7), files(&cluster.whole, 7));
    kept.until("tidied", |s| s.copies.as_ref().unwrap().held_files == 0);
    assert_eq!(kept.data(), cluster.own(0));
    kept.stop();
}

#[test]
fn where_a_buddy_is_full_the_next_one_gets_the_copy() {
    let cluster = Cluster::new();
    let settings = cluster.settings(1, true);
    // All have one host's name here, so the ring is in the order of the drives' names.
    for (number, name) in
        ["00000000000000a0", "00000000000000b1", "00000000000000c2"].iter().enumerate()
    {
        cluster.name_drive(number, name);
    }
    // There is room for its own next save, and almost for a copy beside it.
    let bytes = |rank: usize| cluster.own(rank).values().map(Vec::len).sum::<usize>();
    let capacity = 2 * bytes(1) + bytes(0) - 1;
    let full = cluster.start(1, &format!("capacity = {capacity}"), &cluster.settings(0, true));
    let spare = cluster.start(2, "", &cluster.settings(0, true));
    full.until("seen", |s| s.copies.as_ref().unwrap().nodes.len() == 1);
    let giver = cluster.start(0, "", &settings);
    let status = giver.until("copied", is_copied);
    let copies = status.copies.unwrap();
    assert!(copies.failures > 0, "{copies:?}");
    let told = copies.nodes.iter().find(|node| node.drive == "00000000000000b1").unwrap();
    assert!(told.error.as_ref().unwrap().contains("no room"), "{told:?}");
    assert_eq!(full.data(), cluster.own(1));
    assert_eq!(spare.data(), cluster.own(0));
    [full, spare, giver].into_iter().for_each(Node::stop);
}

#[test]
fn a_file_that_is_damaged_here_is_told_and_comes_nowhere() {
    let cluster = Cluster::new();
    let key = cluster.own(0).into_keys().next().unwrap();
    let path = cluster.path("drive0").join(&key);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[100] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let buddy = cluster.start(1, "", &cluster.settings(0, true));
    let giver = cluster.start(0, "", &cluster.settings(1, true));
    let told = |status: &Status| {
        let error = status.copies.as_ref().and_then(|copies| copies.error.as_ref());
        error.is_some_and(|error| error.contains("not those that were saved"))
    };
    let status = giver.until("told", told);
    assert_eq!(status.steps[0].copies[0], CopyState::OnNodes);
    assert_eq!(status.copies.unwrap().failures, 0, "it is not the buddy's fault");
    buddy.until("nothing comes", |_| buddy.marks().is_empty());
    assert_eq!(buddy.data(), cluster.own(1));
    [buddy, giver].into_iter().for_each(Node::stop);
}

#[test]
fn a_node_that_is_asked_in_another_s_name_counts_as_no_copy() {
    let cluster = Cluster::new();
    // Another drive is announced at this one's address, so that it asks itself.
    let giver = cluster.start(0, "", &cluster.settings(1, true));
    let own = giver.until("told", |status| {
        status.copies.as_ref().is_some_and(|copies| !copies.drive.is_empty())
    });
    let url = format!("https://localhost:{}", giver.address().port());
    cluster.announce("00000000000000b1", &url);
    let status = giver.until("trouble", |status| status.copies.as_ref().unwrap().failures > 1);
    assert!(!is_copied(&status), "{status:#?}");
    let copies = status.copies.unwrap();
    let twin = copies.nodes.iter().find(|node| node.drive == "00000000000000b1").unwrap();
    let own = own.copies.unwrap().drive;
    let expected = format!("drive {own} answers there, not 00000000000000b1");
    assert!(twin.error.as_ref().unwrap().contains(&expected), "{twin:?}");
    giver.stop();
}

#[test]
fn the_token_goes_to_no_port_without_tls_that_somebody_announces() {
    let cluster = Cluster::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    cluster.announce("00000000000000b1", &format!("http://{}", listener.local_addr().unwrap()));
    let giver = cluster.start(0, "", &cluster.settings(1, true));
    let status = giver.until("trouble", |status| status.copies.as_ref().unwrap().failures > 0);
    let error = status.copies.unwrap().nodes[0].error.clone().unwrap();
    assert!(error.contains("https alone"), "{error}");
    assert_eq!(listener.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    giver.stop();
}

#[test]
fn owners_that_do_not_answer_do_not_silence_who_asks() {
    let cluster = Cluster::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    for (number, key) in cluster.own(0).keys().enumerate() {
        let owner = format!("00000000000000b{number:x}");
        cluster.announce(&owner, &url);
        let mark = cluster.path("drive0/.forebay/here/copies").join(key);
        std::fs::create_dir_all(mark.parent().unwrap()).unwrap();
        std::fs::write(mark, format!("{{\"of\":\"{owner}\"}}")).unwrap();
    }
    cluster.name_drive(0, "00000000000000d0");
    let node = cluster.start(0, "", &cluster.settings(0, false));
    let told = cluster.path("records/.forebay/peers/00000000000000d0/told");
    node.until("asked", |status| {
        let age = std::fs::metadata(&told).and_then(|about| about.modified());
        let age = age.ok().and_then(|at| at.elapsed().ok()).unwrap_or_default();
        assert!(age < Duration::from_secs(5), "nothing was announced for {age:?}");
        status.copies.as_ref().unwrap().failures > 1
    });
    node.stop();
}

#[test]
fn certificates_of_others_that_are_replaced_are_read_anew() {
    let cluster = Cluster::new();
    let mut settings = cluster.settings(1, true);
    let other = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let trusted = cluster.path("trusted.pem");
    std::fs::write(&trusted, other.cert.pem()).unwrap();
    settings.copies.peer.as_mut().unwrap().ca_file = Some(trusted.clone());
    let buddy = cluster.start(1, "", &cluster.settings(0, true));
    let giver = cluster.start(0, "", &settings);
    let failed = giver.until("failed", |status| status.copies.as_ref().unwrap().failures > 0);
    assert!(!is_copied(&failed), "{failed:#?}");
    std::fs::copy(cluster.path("cert.pem"), &trusted).unwrap();
    giver.until("copied", is_copied);
    [buddy, giver].into_iter().for_each(Node::stop);
}
