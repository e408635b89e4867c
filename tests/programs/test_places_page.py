"""The programs of docs/guides/remote.md run, against an S3 endpoint on loopback."""

from __future__ import annotations

import pytest

from tests.support.programs import ROOT, run_page
from tests.support.servers import SECRET

pytest.importorskip("obstore")

pytestmark = pytest.mark.programs


def test_its_programs_run_from_top_to_bottom(atlas_of, s3, tmp_path, monkeypatch):
    atlas = atlas_of(2_000, 300)
    bucket = s3("atlases")
    bucket.put(atlas, "atlas.h5ad")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.options["endpoint"])
    # The endpoint refuses nobody who has no key only if the object is public.
    bucket.client.put_object_acl(Bucket=bucket.name, Key="atlas.h5ad", ACL="public-read")
    done = run_page(ROOT / "docs" / "guides" / "remote.md", tmp_path, atlas)
    assert "torch.Size([64, 300])" in done.stdout
    assert "['atlas']" in done.stdout
    assert "True" in done.stdout
