//! Tensors with strides, in files of torch.save, arrive row-major: whole and in parts, over every path. **unsafe**:
//! targets are given by address (in `common`).

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::path::Path;

use common::*;
use forebay_engine::{EngineConfig, LoadOptions, PathChoice, Selection, Wanted, sources_of};
use forebay_format::{Model, Piece, Stored, open_model, read_tensor};
use forebay_tensor::{Region, byte_runs};

fn model() -> Model {
    let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/cases/torch");
    open_model(&cases.join("strided.pt")).unwrap()
}

/// A tensor read without the engine.
fn whole(model: &Model, tensor: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    read_tensor(&model.files, &model.catalog.tensors[tensor], |part| {
        bytes.extend_from_slice(part);
        Ok(())
    })
    .unwrap();
    bytes
}

/// A region of a tensor, cut out of the whole of it.
fn part(model: &Model, want: &Wanted) -> Vec<u8> {
    let entry = &model.catalog.tensors[want.tensor];
    let all = whole(model, want.tensor);
    let Some(region) = &want.region else { return all };
    let runs = byte_runs(entry.dtype, &entry.shape, region).unwrap();
    let run = |(at, _)| all[at as usize..(at + runs.run) as usize].to_vec();
    runs.iter().flat_map(run).collect()
}

fn check(model: &Model, wanted: Vec<Wanted>) {
    let config = EngineConfig { piece_bytes: 64 << 10, ..EngineConfig::default() };
    let engine = host_engine(config);
    for path in [PathChoice::Auto, PathChoice::Direct, PathChoice::Buffered, PathChoice::Fallback] {
        let selection = Selection::new(&model.catalog, wanted.clone()).unwrap();
        let (ordered, plan) = selection.plan(64 << 10).unwrap();
        let options = LoadOptions { path, threads: Some(2), ..LoadOptions::default() };
        let sources = sources_of(&model.files).unwrap();
        let (targets, _) = load_host(&engine, plan, sources, options).unwrap();
        for (want, target) in ordered.iter().zip(&targets) {
            let name = &model.catalog.tensors[want.tensor].name;
            assert!(*target == part(model, want), "{path:?}, {name} {:?}", want.region);
        }
    }
}

#[test]
fn strided_tensors_arrive_row_major() {
    let model = model();
    let all = 0..model.catalog.tensors.len();
    let strided = all.clone().filter(|&at| model.catalog.tensors[at].stored != Stored::Run);
    assert!(strided.count() > 8, "the file holds tensors with strides");
    check(&model, all.map(|tensor| Wanted { tensor, region: None }).collect());
}

#[test]
fn parts_of_strided_tensors_arrive_too() {
    let model = model();
    let entries = model.catalog.tensors.iter().enumerate();
    let halves = entries.flat_map(|(tensor, entry)| {
        let half: Vec<u64> = entry.shape.iter().map(|side| side / 2).collect();
        let rest = entry.shape.iter().zip(&half).map(|(side, half)| side - half).collect();
        let first = Region::new(vec![0; half.len()], half.clone()).unwrap();
        let last = Region::new(half, rest).unwrap();
        [first, last].map(|region| Wanted { tensor, region: Some(region) })
    });
    check(&model, halves.collect());
}

#[test]
fn a_tensor_in_several_pieces_is_put_together() {
    let mut model = model();
    // The whole 6 x 4 matrix again, from its left half and its right one.
    let at = model.catalog.find("whole").unwrap();
    let before = whole(&model, at);
    let entry = &mut model.catalog.tensors[at];
    let piece = |column: u64| Piece {
        region: Region::new(vec![0, column], vec![6, 2]).unwrap(),
        file: 0,
        offset: entry.offset + column * 4,
        strides: Some(vec![4, 1]),
    };
    entry.stored = Stored::Pieces(vec![piece(0), piece(2)]);
    assert_eq!(whole(&model, at), before);
    let region = Region::new(vec![1, 1], vec![4, 2]).unwrap();
    check(&model, vec![Wanted { tensor: at, region: None }]);
    check(&model, vec![Wanted { tensor: at, region: Some(region) }]);
    let outside = Region::new(vec![1, 1], vec![4, 4]).unwrap();
    let wanted = vec![Wanted { tensor: at, region: Some(outside) }];
    assert!(Selection::new(&model.catalog, wanted).is_err());
}
