//! Commands on URLs of buckets do what they do on paths. The bucket is on a real S3 server.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::sync::LazyLock;

use forebay_store::{ObjectStore, PosixStore, Store};
use serde_json::Value;

use crate::ckpt_make::{State, save};
use crate::servers::{self, Reached, fresh_url, reached};
use crate::util::{forebay, json_of, stderr, text};

static SERVER: LazyLock<Option<Reached>> =
    LazyLock::new(|| reached(servers::s3s()).or_else(|| reached(servers::moto())));

/// The command, told of the server as any program of the provider is.
fn command(address: SocketAddr, args: &[&str]) -> Command {
    let mut command = forebay();
    command.args(args).env("AWS_ENDPOINT_URL", format!("http://{address}"));
    command.env("AWS_ACCESS_KEY_ID", servers::KEY).env("AWS_SECRET_ACCESS_KEY", servers::SECRET);
    command.env("AWS_REGION", "us-east-1");
    command
}

/// Two steps in a folder, and all of that in a bucket.
fn two_steps(address: SocketAddr) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 1, 2, 1, &State::new(1));
    save(folder.path(), 2, 2, 2, &State::new(2));
    let url = fresh_url();
    let store = ObjectStore::open(&url, &servers::settings(address)).unwrap();
    for object in PosixStore::open(folder.path()).unwrap().list("", 1000).unwrap() {
        store.put(&object.key, &std::fs::read(folder.path().join(&object.key)).unwrap()).unwrap();
    }
    (folder, url)
}

/// Without what must differ: where, when, how fast.
fn plain(mut value: Value) -> Value {
    match &mut value {
        Value::Object(map) => {
            for key in ["age_s", "seconds", "gb_per_s", "path", "root", "a", "b", "to"] {
                map.remove(key);
            }
            map.values_mut().for_each(|value| *value = plain(value.take()));
        }
        Value::Array(list) => list.iter_mut().for_each(|value| *value = plain(value.take())),
        _ => {}
    }
    value
}

#[test]
fn what_is_said_of_a_bucket_is_what_is_said_of_the_folder() {
    let Some(server) = SERVER.as_ref() else { return };
    let address = server.in_turn;
    let (folder, url) = two_steps(address);
    let local = text(folder.path());
    for (args, places) in [
        (&["ckpt", "list"][..], &[""][..]),
        (&["ckpt", "latest"], &[""]),
        (&["ckpt", "du"], &[""]),
        (&["ckpt", "show"], &["", "/step-1", "/step-1/.metadata"]),
        (&["ckpt", "show", "--step", "1"], &[""]),
        (&["ckpt", "verify"], &["", "/step-2"]),
        (&["ckpt", "verify", "--all"], &[""]),
        (&["inspect", "--digest"], &["/step-2"]),
    ] {
        for place in places {
            let args = [args, &["--json"]].concat();
            let ask =
                |root: &str| plain(json_of(command(address, &args).arg(format!("{root}{place}"))));
            let found = ask(&url);
            assert_eq!(found, ask(local), "{args:?} {place}");
        }
    }
    let pair = |root: &str| [format!("{root}/step-1"), format!("{root}/step-2")];
    let diff = |places: [String; 2]| {
        command(address, &["ckpt", "diff", "--json"]).args(places).output().unwrap()
    };
    let (far, near) = (diff(pair(&url)), diff(pair(local)));
    assert_eq!(far.status.code(), Some(1), "{}", stderr(&far));
    let of = |output: &[u8]| plain(serde_json::from_slice(output).unwrap());
    assert_eq!(of(&far.stdout), of(&near.stdout));
}

#[test]
fn models_are_loaded_and_exported_from_a_bucket() {
    let Some(server) = SERVER.as_ref() else { return };
    let address = server.in_turn;
    let (folder, url) = two_steps(address);
    let load = |place: String, args: &[&str]| {
        let mut command = command(address, &["load", "--device", "host", "--digest", "--json"]);
        json_of(command.args(args).arg(place))
    };
    let step = format!("{}/step-2", text(folder.path()));
    for args in [&[][..], &["--names", "model.layers*"], &["--shard", "0:1/3"]] {
        let (far, near) = (load(format!("{url}/step-2"), args), load(step.clone(), args));
        assert_eq!(far["arrived"], near["arrived"], "{args:?}");
        assert_eq!(far["loads"][0]["paths"][0]["path"], "buffered", "{far}");
    }
    let out = tempfile::tempdir().unwrap();
    let export = |from: &str, to: &Path| {
        json_of(command(address, &["ckpt", "export", "--json", from, "--to"]).arg(to))
    };
    let (far, near) = (out.path().join("far"), out.path().join("near"));
    assert_eq!(plain(export(&url, &far)), plain(export(text(folder.path()), &near)));
    for name in ["model.safetensors", "model.safetensors.index.json"] {
        if near.join(name).exists() {
            assert!(
                std::fs::read(far.join(name)).unwrap() == std::fs::read(near.join(name)).unwrap()
            );
        }
    }
    // And what was exported, from the bucket again: a file by its URL.
    let store = ObjectStore::open(&url, &servers::settings(address)).unwrap();
    let bytes = std::fs::read(far.join("model.safetensors")).unwrap();
    store.put("export/model.safetensors", &bytes).unwrap();
    let again = load(format!("{url}/export/model.safetensors"), &[]);
    assert_eq!(again["arrived"], load(text(&near).to_owned(), &[])["arrived"]);
}

#[test]
fn steps_are_pruned_in_a_bucket_and_damage_is_named() {
    let Some(server) = SERVER.as_ref() else { return };
    let address = server.in_turn;
    let (_folder, url) = two_steps(address);
    let store = ObjectStore::open(&url, &servers::settings(address)).unwrap();
    let prune = ["ckpt", "prune", "--keep-last", "1", "--dry-run", "--json", &url];
    assert_eq!(json_of(&mut command(address, &prune))["unpublished"], serde_json::json!([1]));
    let gc = ["ckpt", "gc", "--dry-run", "--json", &url];
    assert_eq!(json_of(&mut command(address, &gc))["removed"], serde_json::json!([]));
    let names = store.names("step-2/", 100).unwrap().into_iter().map(|(name, _)| name);
    let data = names.into_iter().find(|name| name.ends_with("_0_0.distcp")).unwrap();
    let key = format!("step-2/{data}");
    let (mut bytes, _) = store.get(&key, 1 << 30).unwrap().unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    store.put(&key, &bytes).unwrap();
    let output = command(address, &["ckpt", "verify", &url]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = stderr(&output);
    assert!(
        said.contains("error[checksum]") && said.contains(&format!("{url}/step-2/{data}")),
        "{said}"
    );
}

#[test]
fn what_is_wrong_with_a_place_is_said_without_secrets() {
    let Some(server) = SERVER.as_ref() else { return };
    let url = fresh_url();
    for (args, code, word) in [
        (vec!["load", &url], 1, "error[not_found]"),
        (vec!["ckpt", "latest", &url], 1, "error[not_found]"),
        (vec!["inspect", "ftp://host/x"], 2, "error[usage]"),
        (vec!["inspect", "s3://user:hunter2@bucket/x"], 2, "error[usage]"),
        (vec!["ckpt", "show", "s3://bucket/a/../b"], 1, "error[unsafe_path]"),
        (vec!["ckpt", "export", &url, "--to", "s3://bucket/out"], 2, "error[usage]"),
    ] {
        let output = command(server.in_turn, &args).output().unwrap();
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {said}");
        assert!(said.contains(word), "{args:?}: {said}");
        assert!(!said.contains("hunter2") && !said.contains(servers::SECRET), "{said}");
    }
}
